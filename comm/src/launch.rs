//! Starting ranks (`spawn`), and what each one gets: its GPU, its cores, and enough of what the system
//! limits.

pub(crate) mod cores;
pub mod gpus;
pub(crate) mod limits;
pub mod spawn;
