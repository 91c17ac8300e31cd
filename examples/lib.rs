//! Small programs a newcomer reads and runs. This library holds only what they share.
