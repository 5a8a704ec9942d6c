"""The learner: packing, losses, update, optimizer."""
