"""The page where people look at samples: what it shows, and (in ``page/``) the page itself."""
