"""What several contestants share, per ML framework."""
