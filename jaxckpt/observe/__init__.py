"""What a run tells: metrics, progress, and where its start-up time went."""
