"""Character-level fine-tuning by hand."""
import random
import torch
from torch.utils.data import Dataset, DataLoader
from transformers import GPT2LMHeadModel, GPT2Tokenizer, get_linear_schedule_with_warmup
from torch.optim import AdamW

MODEL = "gpt2"
EPOCHS = 5
BATCH_SIZE = 8
LR = 3e-5
MAX_LEN = 256
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

tokenizer = GPT2Tokenizer.from_pretrained(MODEL)
tokenizer.add_special_tokens({"pad_token": "[PAD]"})
model = GPT2LMHeadModel.from_pretrained(MODEL)
model.resize_token_embeddings(len(tokenizer))
model.to(device)


class TextDataset(Dataset):
    def __init__(self, path):
        self.lines = open(path).read().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        enc = tokenizer(self.lines[i], truncation=True, max_length=MAX_LEN, padding="max_length", return_tensors="pt")
        return enc["input_ids"].squeeze(0), enc["attention_mask"].squeeze(0)


train_set = TextDataset("train.txt")
loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True)
optimizer = AdamW(model.parameters(), lr=LR)
total = len(loader) * EPOCHS
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=total)

model.train()
for epoch in range(EPOCHS):
    running = 0.0
    for input_ids, mask in loader:
        input_ids, mask = input_ids.to(device), mask.to(device)
        outputs = model(input_ids, attention_mask=mask, labels=input_ids)
        loss = outputs[0]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        running += loss.item()
    print(f"epoch {epoch + 1} loss {running / len(loader):.3f}")
    torch.save(model.state_dict(), f"epoch{epoch}.pt")
# ruff: noqa
