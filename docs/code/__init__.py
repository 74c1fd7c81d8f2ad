"""What pages of docs/ are made of that is not written by hand: pictures, and tables of settings."""
