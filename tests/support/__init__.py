"""What tests share: the test cluster, leak checks, waiting."""
