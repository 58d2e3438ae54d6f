"""The processes that train together: their collectives, and FSDP2 sharding of a backbone over them."""
