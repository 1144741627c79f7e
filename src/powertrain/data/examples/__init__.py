"""From what rows mean to tokenised examples with their targets: templates, encoding, the store on disk, its checks."""
