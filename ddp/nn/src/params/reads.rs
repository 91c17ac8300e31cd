//! What a model's parameters tell of themselves.

use std::hash::Hasher as _;
use std::ops::Range;

use ddp_kernels::ops::{Chunk, ChunkTable};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};
use twox_hash::XxHash3_64;

use super::division::WindowPool;
use super::{Parameter, Params, TiedCopy, Window};
use crate::build::ParamId;
use crate::error::{Error, Result};

impl Params {
    /// All parameters and buffers, in the order of the arenas.
    pub fn list(&self) -> &[Parameter] {
        &self.list[..self.own]
    }

    /// The parameters that this part of a split model uses and an earlier part owns. `value` and
    /// `gradient` have memory for them here; they have no master, and are in no list.
    pub fn tied_copies(&self) -> &[TiedCopy] {
        &self.tied_copies
    }

    /// All parameters and buffers in the order of declaration, from the input to the output.
    pub fn in_order(&self) -> Vec<&Parameter> {
        let mut list: Vec<_> = self.list().iter().collect();
        list.sort_by_key(|parameter| parameter.id);
        list
    }

    /// One parameter or buffer, which may be borrowed.
    pub fn parameter(&self, id: ParamId) -> &Parameter {
        &self.list[self.index[id.0]]
    }

    /// The parameter or buffer called `name`.
    pub fn find(&self, name: &str) -> Result<&Parameter> {
        let found = self.list().iter().find(|p| p.name == name);
        found.ok_or_else(|| {
            let names: Vec<_> = self.list().iter().map(|p| p.name.as_str()).collect();
            Error::model(
                "model",
                format!("one of: {}", names.join(", ")),
                name.to_string(),
                "a name is the layer's number in the model, a dot, and weight or bias",
            )
        })
    }

    /// How many ranks the layout lets share the trained part; 1 for the tightest layout.
    pub fn shares(&self) -> usize {
        self.shares
    }

    /// The layers' dtype: that of `value`, of activations and of their gradients.
    pub fn dtype(&self) -> DType {
        self.read_arena().dtype()
    }

    /// The dtype of the masters, of gradients and of moments: the layers' dtype, or f32 if that is
    /// narrower.
    pub fn master_dtype(&self) -> DType {
        self.values.memory.dtype()
    }

    /// The device of all memory.
    pub fn device(&self) -> Device {
        self.values.memory.device()
    }

    /// (A), the masters of all parameters, or of those that this rank has. Call `refresh` after
    /// writing to them.
    pub fn values(&self) -> &Tensor {
        &self.values.memory
    }

    /// The masters of these elements, all of which this rank has.
    pub fn values_of(&self, range: Range<usize>) -> Result<Tensor> {
        self.values.part(range)
    }

    /// The elements of which this rank has the masters, in ascending order: trained ones, then all
    /// others.
    pub fn value_ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.values.within(0..usize::MAX)
    }

    /// A: how many elements the arenas have, but for that of the base.
    pub fn arena_count(&self) -> usize {
        self.read_arena().count()
    }

    /// The trained part of the arenas: 0..T.
    pub fn trained_part(&self) -> Range<usize> {
        0..self.trained
    }

    /// The values of the base, which has no masters; empty without adapters.
    pub fn base(&self) -> &Tensor {
        &self.base
    }

    /// (A), what layers read: the masters, or their rounded copies if layers compute in less.
    pub fn read_arena(&self) -> &Tensor {
        self.working.as_ref().unwrap_or(&self.values.memory)
    }

    /// (T), the masters of all trained parameters, or of those that this rank has.
    pub fn trained_values(&self) -> &Tensor {
        &self.trained_values
    }

    /// (T), the gradients of all trained parameters, or the sums of those that this rank owns.
    pub fn gradients(&self) -> &Tensor {
        &self.gradients.memory
    }

    /// The gradients of these elements, all of which this rank has: what an optimizer reads.
    pub fn gradients_of(&self, range: Range<usize>) -> Result<Tensor> {
        self.gradients.part(range)
    }

    /// Where backward writes the gradients of these elements, which are of one window.
    pub fn written_gradients(&self, range: Range<usize>) -> Result<Tensor> {
        match &self.windows {
            Some(windows) => windows.part(range),
            None => self.gradients.part(range),
        }
    }

    /// The windows of the gradients' arena, if their memory is used again within a backward.
    pub fn windows(&self) -> Option<impl Iterator<Item = &Window>> {
        let all = self.windows.as_ref()?.all.iter();
        Some(all.map(|(window, _)| window))
    }

    /// Bytes of gradients: those that an optimizer reads, and where backward writes them.
    pub fn gradient_bytes(&self) -> usize {
        let windows = self.windows.as_ref().map_or(0, WindowPool::bytes);
        self.gradients.memory.bytes() + windows
    }

    /// The masters of all buffers, which come last; None if there are none.
    pub fn buffers(&self) -> Result<Option<Tensor>> {
        let first = self.list().iter().find(|parameter| parameter.is_buffer);
        let all = first.map(|first| self.values.part(first.range.start..self.arena_count()));
        Ok(all.transpose()?.map(|all| all.named("buffers")))
    }

    /// One parameter's values as layers read them, in its shape and in `dtype`. A buffer is its
    /// master, so that a layer may write to it.
    pub fn value(&self, id: ParamId) -> &Tensor {
        &self.value_views[id.0]
    }

    /// One parameter's master, in its shape and in `master_dtype`: what is trained and saved. Call
    /// `refresh` after writing to it. For one of the base, that which layers read.
    pub fn master(&self, id: ParamId) -> &Tensor {
        assert!(!self.is_borrowed(id), "a borrowed parameter has no master");
        let is_here = self.has_master(self.parameter(id));
        assert!(is_here, "ranks have divided the masters");
        &self.master_views[id.0]
    }

    /// One parameter's gradient, in its shape; None if it is not trained.
    pub fn gradient(&self, id: ParamId) -> Option<&Tensor> {
        self.gradient_views[id.0].as_ref()
    }

    /// How many elements all parameters have, frozen ones included, without padding and buffers.
    pub fn count(&self) -> usize {
        let parameters = self.list().iter().filter(|p| !p.is_buffer);
        parameters.map(|parameter| parameter.range.len()).sum()
    }

    /// How many elements are trained, without padding.
    pub fn trained_count(&self) -> usize {
        let trained = self.list().iter().filter(|p| p.is_trained());
        trained.map(|parameter| parameter.range.len()).sum()
    }

    /// What the optimizer updates: a chunk for each trained parameter.
    pub fn chunks(&self) -> Result<ChunkTable> {
        self.chunks_of(self.trained_part())
    }

    /// The chunks of a part of the gradients' arena, with offsets from the part's start.
    pub(crate) fn chunks_of(&self, part: Range<usize>) -> Result<ChunkTable> {
        let chunk = |p: &Parameter| -> Option<Chunk> {
            let (start, end) = (p.range.start.max(part.start), p.range.end.min(part.end));
            (start < end).then(|| Chunk {
                offset: start - part.start,
                len: end - start,
                decay: p.decays,
            })
        };
        let trained = self.list().iter().filter(|p| p.is_trained());
        Ok(ChunkTable::new(trained.filter_map(chunk).collect())?)
    }

    /// A hash of the bits of all masters, or where ranks have divided them of what layers read,
    /// without the base: equal on replicas that are equal. Copies them to the host.
    pub fn values_hash(&self) -> Result<u64> {
        let mut hash = XxHash3_64::new();
        for (_, part) in self.value_hashes()? {
            hash.write(&part.to_le_bytes());
        }
        Ok(hash.finish())
    }

    /// The same for each parameter, with its name, in the order of declaration. Copies one after
    /// the other to the host, so there is never a second copy of the model in memory.
    pub fn value_hashes(&self) -> Result<Vec<(&str, u64)>> {
        let hash = |parameter: &Parameter| -> Result<u64> {
            let values = if self.has_master(parameter) {
                self.master(parameter.id)
            } else {
                self.value(parameter.id)
            };
            let values = announced("hashing the model", || values.to(Device::Cpu))?;
            let bytes = values.bits_as(DType::U8)?;
            Ok(bytes.with_slice(|bytes: &[u8]| XxHash3_64::oneshot(bytes))?)
        };
        let list = self.in_order().into_iter().filter(|p| !p.is_base);
        list.map(|p| Ok((p.name.as_str(), hash(p)?))).collect()
    }

    /// How many layers use a parameter, here and in later parts of a split model.
    pub fn uses(&self, id: ParamId) -> usize {
        self.uses[id.0]
    }

    /// Whether layers of later parts of a split model use it.
    pub fn is_used_above(&self, id: ParamId) -> bool {
        self.uses_above[id.0] > 0
    }
}
