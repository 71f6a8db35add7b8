"""Small networks that judge and read letters, their training and the scorers on them, as a plug-in of retouch: it
registers them through entry points, as another package would, and imports only what has no leading underscore."""
