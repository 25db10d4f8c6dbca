"""The daemon's end of the client socket: who calls, what they may send, and the answers on their way back."""
