"""The metadata log on brokers and their votes: who may write it, and each broker's copy."""
