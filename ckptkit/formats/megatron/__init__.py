"""Reader of the files that each rank of Megatron-LM wrote before `torch_dist`."""
