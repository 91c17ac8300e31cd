//! What forward, backward and the optimizer call.

use std::time::Instant;

use ddp_kernels::stream::Stream;
use ddp_kernels::{Tensor, trace};
use ddp_nn::optim::muon::Exchange;
use ddp_nn::params::ParamId;
use ddp_nn::pass::Listener;

use super::{Reducer, WAIT_VALUES};
use crate::error::Error;

impl Listener for Reducer {
    /// Waits until the memory of the gradient is free. An error is that of the next `ready`.
    fn writes(&self, parameter: ParamId) {
        // A borrowed parameter is in no bucket.
        let buckets = self.buckets_of.get(parameter.0).filter(|it| !it.is_empty());
        let (Some(windows), Some(buckets)) = (&self.windows, buckets) else {
            return;
        };
        let window = windows.of_bucket[buckets.start];
        if let Err(error) = self.take_window(windows, window) {
            windows.failed.borrow_mut().get_or_insert(error);
        }
    }

    /// The gradient of `parameter` is complete on this rank: starts the buckets that it completes.
    fn ready(&mut self, parameter: ParamId) -> ddp_nn::Result<()> {
        if let Some(error) = self.windows.as_ref().and_then(|it| it.failed.take()) {
            return Err(error.into());
        }
        for bucket in self.buckets_of[parameter.0].clone() {
            assert!(
                self.waiting[bucket] > 0,
                "a gradient was completed twice in one step"
            );
            self.waiting[bucket] -= 1;
        }
        while self.waiting.get(self.next) == Some(&0) {
            self.start_next()?;
        }
        Ok(())
    }

    /// Waits for the values of `parameter`, once per step and bucket.
    fn needed(&self, parameter: ParamId) -> ddp_nn::Result<()> {
        // Frozen parameters and buffers are in no bucket.
        for bucket in self.buckets_of.get(parameter.0).cloned().unwrap_or(0..0) {
            if !self.waited[bucket].replace(true) {
                let started = Instant::now();
                let gather = self.read_gather(bucket);
                trace::record_on(self.device, WAIT_VALUES, || self.queue.wait_for(gather))?;
                self.wait.set(self.wait.get() + started.elapsed());
            }
        }
        Ok(())
    }
}

/// For whole matrices. After the join, so on the stream of the layers.
impl Exchange for Reducer {
    fn gather(&mut self) -> ddp_nn::Result<()> {
        let stream = Stream::current(self.device)?;
        for sum in self.sums.iter().filter(|_| self.is_shared) {
            let gathered = self.group.all_gather(&sum.gradients, &stream);
            gathered.map_err(Error::from)?;
        }
        Ok(())
    }

    fn distribute(
        &mut self,
        matrices: &mut dyn Iterator<Item = (&Tensor, usize)>,
    ) -> ddp_nn::Result<()> {
        if self.group.size() == 1 || self.options.updates_alone {
            return Ok(());
        }
        let (started, stream) = (Instant::now(), Stream::current(self.device)?);
        let given = self.group.grouped(|| {
            for (matrix, owner) in &mut *matrices {
                self.group.broadcast(matrix, owner, &stream)?;
            }
            Ok(())
        });
        self.last.exposed += started.elapsed();
        Ok(given.map_err(Error::from)?)
    }
}
