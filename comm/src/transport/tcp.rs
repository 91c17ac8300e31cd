//! Ranks over TCP, where there is no MPI: how they find and recognise each other (`hello.rs`,
//! `join.rs`, `secret.rs`), and messages between hosts (`mesh.rs`).

mod hello;
mod join;
mod mesh;
mod secret;

pub(crate) use self::hello::JobKey;
pub(crate) use self::join::{Acceptor, Joined, connect, listen, listen_anywhere, listen_for_ranks};
pub(crate) use self::mesh::{FRAME_BYTES_MAX, Letter, MESSAGE_BYTES_MAX, Mesh, MeshChannel};
pub(crate) use self::secret::{SECRET, Secret, job_secret, nonce};
