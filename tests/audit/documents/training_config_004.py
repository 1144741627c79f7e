"""Document 004's production configuration, as the class that its train.py reads."""

from dataclasses import dataclass


@dataclass
class TrainingConfig:
    bucket_name: str = "refocused-ai"
    tokenized_file_pattern: str = "tokenized_*.npz"
    sequence_length: int = 1024
    max_files: int = 5
    use_streaming: bool = False
    learning_rate: float = 2e-4
    warmup_steps: int = 10
    max_steps: int = 25000
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 8
    # Effective batch size = 4 x 8 = 32
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    dataloader_num_workers: int = 4
    dataloader_pin_memory: bool = True
    dataloader_drop_last: bool = True
    prefetch_factor: int = 2
    bf16: bool = True
    fp16: bool = False
    compile_model: bool = True
    use_flash_attention: bool = False
    save_steps: int = 500
    logging_steps: int = 10
    checkpoint_compression: bool = True
    background_upload: bool = True
