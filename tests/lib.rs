//! The whole seen from outside: what the test programs beside this file share.
