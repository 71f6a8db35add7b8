"""`retouch doctor`, and what `retouch check` counts of memory. A module of its own each: `check` needs few of them."""
