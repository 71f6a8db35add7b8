"""From a person's votes on images to a reward that training can use: votes, their page, the fit."""
