"""Files and folders: safe writing, completeness, formats, hub snapshots and model folders."""
