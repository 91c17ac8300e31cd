//! Groups of all ranks.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ddp_kernels::{Device, panics};

use super::World;
use crate::collective::group::Group;
use crate::collective::single::Single;
use crate::error::{Argument, Error, Result};
use crate::transport::nccl::{self, Join};
use crate::transport::shared::CHANNELS;

impl World {
    /// A group over all ranks, independent of every other in use, for tensors in host memory. All
    /// ranks call this in the same order, with the same names. A group that no rank uses any more
    /// is used again.
    pub fn group(&self, name: &'static str) -> Result<Group> {
        self.unused_or(name, None, || {
            let collective = self.links.collective(self.take_channel(name)?)?;
            Ok(Group::new(collective, name, self.timeout))
        })
    }

    /// A group that no rank uses any more, else one that `make` makes. On a GPU only one of this
    /// name: messages about its calls show the name it was made with.
    fn unused_or(
        &self,
        name: &'static str,
        device: Option<Device>,
        make: impl FnOnce() -> Result<Group>,
    ) -> Result<Group> {
        let mut made = panics::lock(&self.made);
        for group in made.iter().filter(|it| it.device() == device) {
            let is_fit = device.is_none() || group.name() == name;
            if is_fit && self.control.all_agree(group.is_unused())? {
                return Ok(group.called(name));
            }
        }
        let group = make()?;
        made.push(group.clone());
        Ok(group)
    }

    /// A group over all ranks for tensors on GPUs. `device` is this rank's, and no other
    /// rank's. All ranks call this in the same order, with the same names. Several ranks need NCCL,
    /// which has [`super::Options::join_timeout`] to connect them. A group of this name that no
    /// rank uses any more is used again.
    ///
    /// A process may have several groups on one GPU. Their calls are made one at a time, and their
    /// work on the device follows the order of the calls, so all ranks make them in the same order
    /// over all these groups. Work in a graph is ordered within the graph. Launch a graph that
    /// holds collectives while the stream of the last eager call, or the stream on which the graph
    /// was captured, is current: that puts it in order with the eager calls.
    ///
    /// A thread watches the group's calls on the device, and ends the process, and with it the job,
    /// if ranks make different calls or do not arrive within the timeout: no call could return such
    /// an error, because it has returned long before. Different calls are detected within a host;
    /// between hosts by the timeout and by `Group::all_agree`. The watch ends with this world.
    #[track_caller]
    pub fn gpu_group(&self, name: &'static str, device: Device) -> Result<Group> {
        let site = Location::caller();
        if !device.is_accelerator() {
            let help = "World::group makes groups for tensors in host memory";
            let error = Argument::error("gpu_group", "device", "a GPU", device, help, site);
            return Err(error);
        }
        if self.size() == 1 {
            let single = Single {
                device: Some(device),
            };
            return Ok(Group::new(Arc::new(single), name, self.timeout));
        }
        self.unused_or(name, Some(device), || {
            let channel = self.take_channel(name)?;
            nccl::join(Join {
                name,
                device,
                control: &self.control,
                failure: &self.failure,
                watches: &self.gpu_watches,
                host: self.links.collective(channel)?,
                channel,
                timeout: self.timeout,
                join_timeout: self.join_timeout,
                of_processes: self.of_processes,
                choice: self.nccl,
                site,
            })
        })
    }

    /// A group over all ranks for tensors on `device`: as [`World::gpu_group`] on a GPU, else
    /// as [`World::group`].
    #[track_caller]
    pub fn group_on(&self, device: Device, name: &'static str) -> Result<Group> {
        if device.is_accelerator() {
            return self.gpu_group(name, device);
        }
        self.group(name)
    }

    /// The channel of the next group.
    fn take_channel(&self, name: &str) -> Result<usize> {
        let channel = self.next_channel.fetch_add(1, Ordering::Relaxed);
        if channel < CHANNELS {
            return Ok(channel);
        }
        self.next_channel.fetch_sub(1, Ordering::Relaxed);
        let reason = format!("at most {CHANNELS} groups may be in use, including the world's own");
        let help = "make each group once, and clone it";
        Err(Error::setup(format!("make the group {name}"), reason, help))
    }
}
