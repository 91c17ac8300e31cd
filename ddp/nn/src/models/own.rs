//! A model of a program's own layers, without settings.

use std::fmt;
use std::sync::Arc;

use super::family::{DataShape, Family, Setting, Settings};
use crate::Sequential;
use crate::error::{Error, Result};

type Make = dyn Fn(&DataShape<'_>) -> Result<Sequential> + Send + Sync;

/// The model that a function makes for data of a shape.
#[derive(Clone)]
pub struct OwnLayers(Option<Arc<Make>>);

impl OwnLayers {
    /// The model that `make` makes. It is called more than once, and must make the same each time.
    pub fn new(
        make: impl Fn(&DataShape<'_>) -> Result<Sequential> + Send + Sync + 'static,
    ) -> OwnLayers {
        OwnLayers(Some(Arc::new(make)))
    }
}

impl Default for OwnLayers {
    /// A model of an unknown program: what a checkpoint says of it.
    fn default() -> OwnLayers {
        OwnLayers(None)
    }
}

impl fmt::Debug for OwnLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnLayers")
    }
}

impl Settings for OwnLayers {
    fn settings(&mut self) -> Vec<Setting<'_>> {
        Vec::new()
    }

    fn boxed(&self) -> Box<dyn Family> {
        Box::new(self.clone())
    }
}

impl Family for OwnLayers {
    fn name(&self) -> &'static str {
        "own"
    }

    fn help(&self) -> &'static str {
        "Layers that only the program has that trained them"
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        match &self.0 {
            Some(make) => make(data),
            None => Err(Error::model(
                "model own",
                "the program that trained it, which has its layers",
                "another program",
                "use it there, or make the layers a family and register it",
            )),
        }
    }
}
