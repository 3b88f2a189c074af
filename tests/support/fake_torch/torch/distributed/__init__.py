"""The part of torch.distributed that starts workers."""
