//! Ranks over TCP: how they find and recognise each other (`hello.rs`, `interfaces.rs`, `join.rs`,
//! `secret.rs`), and messages between hosts (`mesh.rs`).

mod hello;
#[cfg(feature = "mpi")]
mod interfaces;
mod join;
mod mesh;
mod secret;

pub(crate) use self::hello::JobKey;
#[cfg(feature = "mpi")]
pub(crate) use self::interfaces::own_addresses;
pub(crate) use self::join::{Acceptor, Joined, connect, listen, listen_for_ranks};
pub(crate) use self::mesh::{FRAME_BYTES_MAX, Letter, MESSAGE_BYTES_MAX, Mesh, MeshChannel};
pub(crate) use self::secret::{SECRET, Secret, job_secret, nonce};
