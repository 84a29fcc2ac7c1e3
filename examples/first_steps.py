import torch

from dynamicemb import DynamicEmbedding

torch.manual_seed(0)
rows = DynamicEmbedding(16)  # no num_embeddings: any 64-bit integer is an id
model = torch.nn.Sequential(rows, torch.nn.Flatten(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
ids = torch.randint(-(2**63), 2**63 - 1, (1000, 2))  # 1,000 examples: a user, an item
labels = (ids[:, :1] % 2 == 0).float()
for _ in range(20):
    optimizer.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}, {len(rows.table)} rows, {rows.table.stats().bytes} bytes")
