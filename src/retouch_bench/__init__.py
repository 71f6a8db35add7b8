"""Published benchmarks with their official scorers and data formats, as a plug-in of retouch: it registers them through
entry points, as another package would, and imports only what has no leading underscore."""
