"""The host processes that devices run in, and the daemon's end of them. torch, onnxruntime and faiss are imported here and below only."""
