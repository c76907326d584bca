"""The user's process: captures training state into slots and restores it. The only room that imports torch.

Must not know boto3, requests or any store: everything that leaves this process goes through `harness.ipc`.
"""
