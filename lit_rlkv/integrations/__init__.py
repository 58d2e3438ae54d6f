"""This project inside other libraries: TRL's GRPOTrainer, and `generate` of transformers."""
