"""AWS: notices of EC2, instance metadata, the instance and its Auto Scaling group."""
