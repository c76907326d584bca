"""The trainer process as the agent sees it: started, connected, asked for snapshots, restarted."""
