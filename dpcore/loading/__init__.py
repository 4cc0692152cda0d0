"""The batches: how they are drawn, which loaders are refused, and the ledger of those that were used."""
