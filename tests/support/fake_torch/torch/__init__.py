"""A stand-in for torch where many hosts each need a torchrun and none needs a tensor: see `torch.distributed.run`."""

__version__ = "0+fake"
