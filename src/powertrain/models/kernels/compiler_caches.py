"""The folders from which torch's compiler and Triton load machine code that an earlier process has compiled."""

from pathlib import Path

from powertrain.machine import NotOwn, own_folder
from powertrain.records import WrongUse


def own_compiler_caches() -> None:
    """Make the folders this user's alone: torch looks at no owner, and its default is a name in /tmp that anybody can guess.

    Raises WrongUse where somebody else has made one of them, or may replace it.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir  # which loads the compiler

    try:
        for folder in dict.fromkeys((cache_dir(), triton_cache_dir(0))):
            own_folder(Path(folder).absolute())
    except NotOwn as error:
        raise WrongUse(f"{error}; name folders of your own with TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR, or compile "
                       "nothing with techniques.torch_compile=off techniques.fused_blocks=off",
                       cure=("techniques.torch_compile=off", "techniques.fused_blocks=off")) from None
