//! Models to split, and how they are trained.

use super::*;

/// Where the parts of each rank lie.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) ranks: usize,
    /// By rank.
    pub(crate) devices: Vec<Vec<Device>>,
}

/// One way of training.
#[derive(Clone)]
pub(crate) struct Recipe {
    pub(crate) data: Arc<Rows>,
    pub(crate) hidden: Vec<usize>,
    pub(crate) activation: Activation,
    pub(crate) dropout: f64,
    pub(crate) batch: u64,
    pub(crate) micro: Option<usize>,
    pub(crate) rule: Rule,
    pub(crate) clip_norm: f64,
    pub(crate) frozen: &'static str,
    pub(crate) reduce_dtype: DType,
    pub(crate) zero: u64,
    /// Whether layers "2", "4" and "6" are tied, of 40 inputs and outputs each.
    pub(crate) tied: bool,
    /// Whether all layers are in one module.
    pub(crate) own: bool,
    /// Whether no gradient flows to the layers below its third one.
    pub(crate) stops: bool,
    /// Of values and gradients.
    pub(crate) dtype: DType,
    /// Into how many shards batches are cut.
    pub(crate) shards: Option<usize>,
}

/// Four layers, past two of which their input goes.
#[derive(Debug)]
struct OwnModule {
    dropout: f64,
    stops: bool,
}

impl Module for OwnModule {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let mut x = m.layer("0", x, Linear::new(40));
        for name in ["2", "4"] {
            if self.stops && name == "4" {
                x = x.without_gradient();
            }
            let inner = m.layer(name, &x, Linear::new(40)).gelu();
            x = x + m.layer(&format!("{name}.drop"), &inner, Dropout::new(self.dropout));
        }
        m.layer("6", &x, Linear::new(OUTPUTS))
    }
}

impl Recipe {
    /// Four layers on rows of numbers; whole batches, but for the last of an epoch.
    pub(crate) fn new(task: TaskSpec) -> Recipe {
        Recipe {
            data: Arc::new(Rows::new(40, FEATURES, task, uniform)),
            hidden: vec![40, 40, 24],
            activation: Activation::Relu,
            dropout: 0.0,
            batch: 12,
            micro: None,
            rule: Rule::adamw(),
            clip_norm: 0.0,
            frozen: "nothing",
            reduce_dtype: DType::F32,
            zero: 0,
            tied: false,
            own: false,
            stops: false,
            dtype: DType::F32,
            shards: None,
        }
    }

    /// The same with a weight that three layers share, the first of which is "2".
    pub(crate) fn tied(self) -> Recipe {
        Recipe { tied: true, ..self }
    }

    fn layers(&self) -> Sequential {
        if self.own {
            let (dropout, stops) = (self.dropout, self.stops);
            return Sequential::new().then(OwnModule { dropout, stops });
        }
        let (hidden, activation) = (self.hidden.clone(), self.activation);
        if !self.tied {
            let (outputs, dropout) = (OUTPUTS, self.dropout);
            return Mlp {
                hidden,
                outputs,
                activation,
                dropout,
            }
            .layers();
        }
        let tie = Tie::new();
        let mut layers = Sequential::new().then(Linear::new(40));
        for tied in 0..3 {
            layers = layers.then(Activate::new(activation));
            if self.dropout > 0.0 {
                layers.push_unnumbered(Box::new(Dropout::new(self.dropout)));
            }
            let linear = Linear::new(40).tied(&tie);
            // A later layer says that its weight is a hidden matrix, for Muon.
            layers = layers.then(if tied == 0 { linear.outer() } else { linear });
        }
        layers
            .then(Activate::new(activation))
            .then(Linear::new(OUTPUTS).outer())
    }

    pub(crate) fn regression() -> Recipe {
        Recipe::new(TaskSpec::Regression { outputs: OUTPUTS })
    }

    pub(super) fn classification() -> Recipe {
        Recipe::new(TaskSpec::numbered_classes(OUTPUTS))
    }

    /// The step of a rank over these devices.
    pub(crate) fn step(&self, devices: &[Device], world: &World) -> Result<Step> {
        self.step_with(devices, world, GraphChoice::Auto)
    }

    pub(crate) fn step_with(
        &self,
        devices: &[Device],
        world: &World,
        graph: GraphChoice,
    ) -> Result<Step> {
        let group = |index: usize| -> Result<Group> {
            match devices[index] {
                // A world has a limited number of groups, and a test makes steps.
                _ if world.size() == 1 => Ok(Group::alone()),
                Device::Cpu => Ok(world.group(GROUPS[index])?),
                device => Ok(world.gpu_group(GROUPS[index], device)?),
            }
        };
        let groups = (0..devices.len()).map(group).collect::<Result<Vec<_>>>()?;
        let sizes = BucketSizes {
            first_elements: 1024,
            elements: 1024,
            cuts_parameters: true,
        };
        let reducer = ReducerOptions {
            sizes: Some(sizes),
            dtype: self.reduce_dtype,
            overlap: true,
            zero: self.zero,
            shards: self.shards,
            ..ReducerOptions::default()
        };
        let sharing = reducer.sharing(world.rank(), world.size());
        let frozen = |name: &str| self.frozen.split(',').any(|layer| name.starts_with(layer));
        let models = Model::split(
            self.layers(),
            &[FEATURES],
            devices,
            |layers, shape, device| {
                Model::with_shares(
                    layers,
                    shape,
                    self.dtype,
                    device,
                    3,
                    &frozen,
                    sharing.clone(),
                )
            },
        )?;
        let part = |(model, group): (Model, Group)| -> Result<StageSpec> {
            let optimizer = Optimizer::of_slices(
                self.rule,
                &model.params,
                &ddp::reducer::owned(&model.params, &group, reducer),
            )?;
            Ok(StageSpec {
                model,
                optimizer,
                group,
            })
        };
        let parts = models
            .into_iter()
            .zip(groups)
            .map(part)
            .collect::<Result<Vec<_>>>()?;
        let loss = tasks::of(self.data.task()).loss(&LossOptions::default(), Device::Cpu)?;
        let options = StepOptions {
            reducer,
            clip_norm: self.clip_norm,
            seed: 5,
            graph,
        };
        Step::over(parts, loss, &options)
    }

    pub(crate) fn loader(&self, devices: &[Device], world: &World) -> Result<Loader> {
        let sampler = Sampler::new(self.data.rows(), self.batch, 7, false)?;
        let (source, shards) = (self.source(devices), self.shards_of(world));
        Ok(Loader::in_shards(source, sampler, shards, self.micro)?)
    }

    fn shards_of(&self, world: &World) -> Shards {
        let (rank, size) = (world.rank(), world.size());
        Shards::of_rank(self.shards.unwrap_or(size), rank, size)
    }

    pub(super) fn source(&self, devices: &[Device]) -> Source {
        Source::new(self.data.clone(), [devices[0], devices[devices.len() - 1]])
    }

    pub(super) fn train(&self, devices: &[Device], world: &World) -> Result<Seen> {
        let mut step = self.step(devices, world)?;
        let mut loader = self.loader(devices, world)?;
        let mut reports = Vec::new();
        for step0 in 0..STEPS {
            step.measure_norm(step0 % 3 == 0);
            step.run(loader.load(step0)?, RATE)?;
            reports.push(step.report()?);
        }
        step.measure_norm(false);
        step.gather()?;
        let row_losses = step.losses_of(&loader.load(STEPS)?.clone())?;
        step.run(loader.load(STEPS)?, RATE)?;
        let mut in_order = InOrder::in_shards(self.source(devices), self.shards_of(world), 9)?;
        // Evaluation runs on a new stream: the sum over ranks must wait for it.
        let last = devices[devices.len() - 1];
        let group = match last {
            Device::Cpu => world.group("main")?,
            _ => world.gpu_group("evaluation", last)?,
        };
        let stream = Stream::new(last)?;
        let evaluation = stream.scope(|| step.evaluate(&mut in_order, &group))?;
        let again = stream.scope(|| step.evaluate(&mut in_order, &group))?;
        assert_eq!(again, evaluation, "a second evaluation");
        if self.shards.is_some() {
            let hosts = world.group("evaluation on the host")?;
            let there = stream.scope(|| step.evaluate(&mut in_order, &hosts))?;
            assert_eq!(there, evaluation, "added on the host");
        }
        assert_eq!(
            evaluation.rows,
            self.data.rows() as f64,
            "rows of all ranks"
        );
        Ok(Seen {
            values: values(&step)?,
            moments: moments(&step)?,
            reports,
            evaluation,
            row_losses,
        })
    }
}
