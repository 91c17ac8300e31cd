//! MPI and TCP behind one interface.

use std::time::Duration;

use crate::error::Result;
#[cfg(feature = "mpi")]
use crate::transport::mpi;
use crate::transport::tcp;
use crate::waited::wait_until;

/// The most bytes of one message.
pub(crate) const MESSAGE_BYTES_MAX: usize = tcp::MESSAGE_BYTES_MAX;

/// Ranks that can send to each other. A message on one communicator is never received on another.
#[derive(Debug)]
pub(crate) enum Comm {
    #[cfg(feature = "mpi")]
    Mpi(mpi::MpiComm),
    Tcp(tcp::MeshChannel),
}

impl Comm {
    /// In words: "mpi", "tcp".
    pub(crate) fn name(&self) -> &'static str {
        match self {
            #[cfg(feature = "mpi")]
            Comm::Mpi(_) => "mpi",
            Comm::Tcp(_) => "tcp",
        }
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        match self {
            #[cfg(feature = "mpi")]
            Comm::Mpi(comm) => comm.rank(),
            Comm::Tcp(channel) => channel.rank(),
        }
    }

    /// How many ranks.
    pub(crate) fn size(&self) -> usize {
        match self {
            #[cfg(feature = "mpi")]
            Comm::Mpi(comm) => comm.size(),
            Comm::Tcp(channel) => channel.size(),
        }
    }

    /// The same ranks again. All ranks call this in the same order.
    pub(crate) fn duplicate(&self, timeout: Duration) -> Result<Comm> {
        match self {
            #[cfg(feature = "mpi")]
            Comm::Mpi(comm) => Ok(Comm::Mpi(comm.duplicate(timeout)?)),
            Comm::Tcp(channel) => {
                // There is nothing to wait for.
                _ = timeout;
                Ok(Comm::Tcp(channel.duplicate()))
            }
        }
    }

    /// Starts to send `bytes` to rank `to`.
    pub(crate) fn send<'a>(&self, bytes: &'a [u8], to: usize, tag: u8) -> Result<Request<'a>> {
        match self {
            #[cfg(feature = "mpi")]
            Comm::Mpi(_) => self.tell(bytes, to, tag),
            Comm::Tcp(channel) => Ok(Request::Tcp(channel.send(bytes, to, tag.into()))),
        }
    }

    /// As `send`, with a copy of `bytes`.
    pub(crate) fn tell(&self, bytes: &[u8], to: usize, tag: u8) -> Result<Request<'static>> {
        match self {
            #[cfg(feature = "mpi")]
            Comm::Mpi(comm) => {
                let request = comm.send(bytes.into(), to, tag.into())?;
                Ok(Request::Mpi(request, None))
            }
            Comm::Tcp(channel) => Ok(Request::Tcp(channel.tell(bytes, to, tag.into()))),
        }
    }

    /// Starts to receive from rank `from` as many bytes as `into` has. After an error these may be
    /// any bytes that came.
    pub(crate) fn receive<'a>(
        &self,
        into: &'a mut [u8],
        from: usize,
        tag: u8,
    ) -> Result<Request<'a>> {
        match self {
            #[cfg(feature = "mpi")]
            Comm::Mpi(comm) => {
                let request = comm.receive(into.len(), from, tag.into())?;
                Ok(Request::Mpi(request, Some(into)))
            }
            Comm::Tcp(channel) => Ok(Request::Tcp(channel.receive(into, from, tag.into()))),
        }
    }

    /// Moves what can be moved at once from and to all ranks.
    pub(crate) fn advance(&self) {
        match self {
            #[cfg(feature = "mpi")]
            Comm::Mpi(_) => {}
            Comm::Tcp(channel) => channel.advance(),
        }
    }

    /// A message that has come with this tag from any rank: its sender, and its length in bytes.
    pub(crate) fn arrived(&self, tag: u8) -> Result<Option<(usize, usize)>> {
        match self {
            #[cfg(feature = "mpi")]
            Comm::Mpi(comm) => comm.arrived(tag.into()),
            Comm::Tcp(channel) => Ok(channel.arrived(tag.into())),
        }
    }

    /// A rank whose connection has been lost for so long, and its host. MPI does not say.
    pub(crate) fn lost(&self, after: Duration) -> Option<(usize, String)> {
        match self {
            #[cfg(feature = "mpi")]
            Comm::Mpi(_) => None,
            Comm::Tcp(channel) => channel.lost(after),
        }
    }
}

/// A message under way.
#[derive(Debug)]
pub(crate) enum Request<'a> {
    /// With the memory to which it goes.
    #[cfg(feature = "mpi")]
    Mpi(mpi::MpiRequest, Option<&'a mut [u8]>),
    Tcp(tcp::Letter<'a>),
}

impl Request<'_> {
    /// Whether it is done. Lets messages under way move.
    pub(crate) fn is_done(&mut self) -> Result<bool> {
        match self {
            #[cfg(feature = "mpi")]
            Request::Mpi(request, into) => {
                let is_done = request.is_done()?;
                if let Some(into) = into.take_if(|_| is_done) {
                    into.copy_from_slice(&request.take_bytes());
                }
                Ok(is_done)
            }
            Request::Tcp(letter) => letter.is_done(),
        }
    }

    /// Whether it is done before `timeout` has passed.
    pub(crate) fn is_done_within(&mut self, timeout: Duration) -> Result<bool> {
        wait_until(timeout, || self.is_done())
    }
}
