"""What several ranks hold of one state: wrappers of torch.distributed, and the layout of their tensors."""
