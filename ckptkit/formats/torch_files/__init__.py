"""Single files that `torch.save` wrote."""
