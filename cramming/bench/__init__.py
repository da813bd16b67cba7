"""What each trick brings on this device, whether it still learns the same, and how others do on the same shapes."""
