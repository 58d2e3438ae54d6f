"""LightningModules, thin adapters between parameters and objectives."""
