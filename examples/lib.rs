//! Small programs to read and run. This library holds what they share.
