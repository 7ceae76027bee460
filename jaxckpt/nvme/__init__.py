"""Training state that lives on local disks and streams through the update. See `array`, `store`, `pipeline`."""
