"""What is counted of memory and of messages."""
