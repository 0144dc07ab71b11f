"""Training: config, data, model, engine, parallel processes, trainer, checkpoints."""
