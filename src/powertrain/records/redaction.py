"""Secrets in text: what looks like one is taken out before it is shown or written, and refused in a recipe."""

import re

MARK = "[secret removed]"
SECRETS = re.compile(r"""
    \b(?:hf_|api_org_)[A-Za-z0-9]{16,}                                  # Hugging Face
  | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w{20,}                 # GitHub
  | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b                                       # AWS: the key's name
  | \bAIza[\w-]{30,}                                                    # Google
  | \bsk-[\w-]{20,} | \bxox[abprs]-[\w-]{10,}                           # OpenAI and Anthropic; Slack
  | \beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}                          # JSON web tokens
  | (?<=://)[^\s/@"'<>]{1,512}(?=@)                                     # https://USER:PASSWORD@host
  | (?<=[?&])(?:(?:access_|auth_|id_)?token|api_?key|key|sig(?:nature)?|secret|password|X-Amz-(?:Signature|Credential|
    Security-Token))=[^\s&"'\#\\<>]+                                    # https://host/file?token=SECRET
  | \b(?:HF_TOKEN|HUGGING_FACE_HUB_TOKEN|WANDB_API_KEY|AWS_SECRET_ACCESS_KEY|AWS_SESSION_TOKEN|OPENAI_API_KEY)
    (?:=|\\?["']?\s*:\s*\\?["']?)[^\s"'\\,;}]{8,}                     # as a shell or JSON writes it
  | (?<=\bBearer[ ])[\w.~+/=-]{12,}
""", re.VERBOSE | re.IGNORECASE)


def redacted(text: str) -> str:
    """Return the text with a mark in place of each token, password and key that is known by its form."""
    return SECRETS.sub(MARK, text)


def holds_a_secret(text: str) -> bool:
    return SECRETS.search(text) is not None
