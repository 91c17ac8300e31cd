//! Starts ranks (`spawn`), gives each its GPU and its cores, and checks the system's limits; hears
//! signals that ask to stop (`stop`).

pub(crate) mod cores;
pub mod gpus;
pub(crate) mod limits;
pub mod spawn;
pub(crate) mod stop;
