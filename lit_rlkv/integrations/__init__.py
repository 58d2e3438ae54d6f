"""This project inside other libraries: TRL's GRPOTrainer and RLOOTrainer, and `generate` of transformers."""
