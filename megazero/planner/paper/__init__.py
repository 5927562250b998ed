"""Tables and figures of the ZeRO paper (arXiv 1910.02054) from this code run dry, beside the paper's own."""
