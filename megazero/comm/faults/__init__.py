"""The record of a rank and its collectives, and what is done and reported when a rank of the job fails."""
