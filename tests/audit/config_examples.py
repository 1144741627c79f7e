"""Small configs of each format, with the keys of the public examples and of the documents; model and data are the tests'."""

from __future__ import annotations

# as axolotl's examples/llama-3 lora and qlora-fsdp have it
AXOLOTL_LORA = """\
base_model: base
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: false

datasets:
  - path: data.jsonl
    type: alpaca
dataset_prepared_path:
val_set_size: 0.25
output_dir: ./outputs/lora

sequence_len: 64
sample_packing: true
eval_sample_packing: false

adapter: lora
lora_model_dir:
lora_r: 4
lora_alpha: 8
lora_dropout: 0.05
lora_target_linear: true

wandb_project:

gradient_accumulation_steps: 2
micro_batch_size: 3
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002

bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true

warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.01
special_tokens:
   pad_token: <pad>
"""
AXOLOTL_QLORA_FSDP = """\
base_model: base
load_in_4bit: true
adapter: qlora
datasets:
  - path: org/rows
    type: chat_template
    split: train[:1%]
val_set_size: 0
sequence_len: 512
sample_packing: false
pad_to_sequence_len: true
train_on_inputs: true
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
gradient_accumulation_steps: 4
micro_batch_size: 1
num_epochs: 4
optimizer: adamw_torch_fused
lr_scheduler: linear
learning_rate: 0.00001
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: true
warmup_steps: 10
seed: 7
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rms_norm: true
fsdp:
  - full_shard
fsdp_config:
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
deepspeed:
"""
# as LLaMA-Factory's examples/train_lora, train_full and train_qlora have it
LLAMA_FACTORY_LORA = """\
### model
model_name_or_path: base
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
### dataset
dataset: mine
dataset_dir: sets
template: qwen3_nothink
cutoff_len: 64
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
### output
output_dir: saves/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
"""
LLAMA_FACTORY_FULL = """\
model_name_or_path: base
stage: sft
do_train: true
finetuning_type: full
deepspeed: ds_z3_config.json
dataset: mine
dataset_dir: sets
template: llama3
cutoff_len: 64
output_dir: saves/full/sft
save_steps: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""
LLAMA_FACTORY_QLORA = """\
model_name_or_path: base
quantization_bit: 4
quantization_method: bnb
double_quantization: false
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: q_proj, v_proj
dataset: mine
dataset_dir: sets
cutoff_len: 1024
train_on_prompt: true
neat_packing: true
flash_attn: fa2
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 0.0001
num_train_epochs: 1.0
lr_scheduler_type: constant_with_warmup
warmup_steps: 20
fp16: true
optim: paged_adamw_32bit
"""
# TrainingArguments as transformers writes them, and with TRL's keys beside them
HUGGING_FACE = """\
{
\t"output_dir": "out",
\t"per_device_train_batch_size": 4,
\t"gradient_accumulation_steps": 2,
\t"learning_rate": 5e-5,
\t"num_train_epochs": 2,
\t"lr_scheduler_type": "linear",
\t"warmup_steps": 5,
\t"weight_decay": 0.01,
\t"eval_steps": 50,
\t"save_strategy": "epoch",
\t"fp16": true,
\t"optim": "adamw_torch",
\t"group_by_length": true,
\t"gradient_checkpointing": true,
\t"dataloader_num_workers": 2,
\t"torch_compile": false,
\t"label_smoothing_factor": 0.0,
\t"report_to": ["wandb"],
\t"deepspeed": {"zero_optimization": {"stage": 2}}
}
"""
SFT = """\
model_name_or_path: base
dataset_name: org/rows
use_peft: true
lora_r: 8
lora_target_modules: [q_proj]
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
max_length: 512
packing: true
assistant_only_loss: true
num_train_epochs: 1
learning_rate: 2.0e-4
eval_strategy: "no"
bf16: true
neftune_noise_alpha: 5
gradient_acumulation: 3
"""
# document 001's snippets joined: JSON with its comments
MODELFORGE = """\
{
  "provider": "unsloth",
  "model_name": "base",
  "task": "text-generation",
  "dataset": "data.jsonl",
  "use_4bit": false,
  "bf16": true,
  "fp16": false,
  "tf32": true,  // Enable TF32 on Ampere+
  "per_device_train_batch_size": 4,  // Increase from default 1
  "gradient_accumulation_steps": 2,  // Decrease from default 4
  "max_seq_length": 64,  // Instead of 2048
  "gradient_checkpointing": true,
  "lora_r": 16,
  "optim": "paged_adamw_32bit",
  "dataloader_pin_memory": true,
  "group_by_length": true,
  "packing": true,
  "learning_rate": 3e-4,
  "warmup_ratio": 0.03,
  "lr_scheduler_type": "cosine"
}
"""
LORA_TRAINER = """\
lora:
  model_id: base
  dataset_path: data.jsonl
  use_4bit: false
  batch_size: 4                    # 2x throughput (was 2)
  gradient_accumulation_steps: 2   # Maintains effective batch = 8
  eval_steps: 20
  save_steps: 100
  logging_steps: 5
  save_total_limit: 1
  max_seq_length: 64
dataset:
  batch_size: 10
  temperature: 0.85
api_models: []
"""
CHARACTER_TRANSFORMER = """\
device: auto
seed: 42
training:
  epochs: 25
  batch_size: 128  # Optimal for 16GB VRAM
  learning_rate: 1e-4
  gradient_clip: 1.0
  val_split: 0.1
  eval_interval: 5
  save_interval: 5
  log_interval: 100
  use_compile: true
model:
  n_layer: 2
  n_head: 2
  n_embd: 32
  dropout: 0.2
  bias: false
  context_length: 16
noise:
  sigma_min: 1e-4
datasets:
  mine: {path: text.txt, enabled: true, max_chars: 900}
  other: {path: other.txt, enabled: false}
"""
REFOCUSED = """\
class TrainingConfig:
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 8
    learning_rate = 2e-4
    warmup_steps = 10
    max_steps = 25000
    sequence_length = 1024
    weight_decay = 0.1
    bf16 = True
    compile_model = True
    checkpoint_compression = True
    background_upload = True
    save_steps = 1250
    dataloader_num_workers = 4
    output_dir = "/".join(["a", "b"])
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: false
"""
DEEPSPEED = """\
{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_clipping": 1.0,
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true
  },
  "bf16": {"enabled": "auto"}
}
"""
POWERTRAIN = """\
method: lora
model: {path: base}
lora: {r: 8}
data: {source: data.jsonl, max_length: 64}
train_batch_size: 8
techniques: {packing: "on", bf16: off}
"""
# with the keys of torchtune's recipes and of nanoGPT's config folder
TORCHTUNE = """\
output_dir: /tmp/tuned
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'output_proj']
  apply_lora_to_mlp: true
  lora_rank: 4
  lora_alpha: 8
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: base/tokenizer.model
  max_seq_len: 64
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: base
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: true
  train_on_input: false
batch_size: 2
gradient_accumulation_steps: 3
epochs: 1
seed: 5
shuffle: true
optimizer:
  _component_: torch.optim.AdamW
  fused: true
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 7
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
clip_grad_norm: null
dtype: bf16
enable_activation_checkpointing: false
"""
NANOGPT = """\
out_dir = 'out-shakespeare-char'
eval_interval = 250
always_save_checkpoint = False
wandb_log = False
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1 * 2
batch_size = 32
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
"""
# file name -> (text, framework)
ALL = {
    "lora.yml": (AXOLOTL_LORA, "axolotl"), "qlora-fsdp.yaml": (AXOLOTL_QLORA_FSDP, "axolotl"),
    "llama3_lora_sft.yaml": (LLAMA_FACTORY_LORA, "llama-factory"),
    "llama3_full_sft.yaml": (LLAMA_FACTORY_FULL, "llama-factory"),
    "llama3_qlora_sft.yaml": (LLAMA_FACTORY_QLORA, "llama-factory"), "training_args.json": (HUGGING_FACE, "transformers"),
    "sft.yaml": (SFT, "trl"), "modelforge.json": (MODELFORGE, "modelforge"), "config.yaml": (LORA_TRAINER, "lora-trainer"),
    "character.yaml": (CHARACTER_TRANSFORMER, "character-transformer"), "training_config.py": (REFOCUSED, "accelerate"),
    "default_config.yaml": (ACCELERATE, "accelerate"), "ds_z3_config.json": (DEEPSPEED, "deepspeed"),
    "recipe.yaml": (POWERTRAIN, "powertrain"), "torchtune.yaml": (TORCHTUNE, "torchtune"),
    "train_shakespeare_char.py": (NANOGPT, "nanogpt"),
}
TRAINABLE = [name for name in ALL if name not in ("default_config.yaml", "ds_z3_config.json")]
