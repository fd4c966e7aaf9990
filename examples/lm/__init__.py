"""The parts of train_lm.py: corpus, batches, model, baselines, checkpoints, report."""
