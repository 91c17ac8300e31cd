//! What each rank has of the moments and the values, and what is refused.

use super::*;

#[test]
fn moments_are_one_nth_of_plain_ones_and_a_rank_alone_has_them_all() {
    let Some(_turn) = turn() else { return };
    let bytes = |way: Way, zero: bool, ranks: usize| -> Vec<usize> {
        let case = way.of(&Case {
            zero,
            hidden: vec![200, 200],
            ..long()
        });
        on_ranks(ranks, None, |world| {
            let step = case.step(world)?;
            let pieces: usize = step.stages()[0]
                .optimizer()
                .owned_pieces()
                .iter()
                .map(|piece| piece.length)
                .sum();
            let trained = step.stages()[0].model().params.trained_count();
            assert!(zero || pieces == trained, "{pieces} of {trained}");
            Ok(step.stages()[0]
                .optimizer()
                .moments()
                .map(|(_, moment)| moment.bytes())
                .sum())
        })
    };
    for way in ways() {
        let all = bytes(way, false, 1)[0];
        assert_eq!(
            bytes(way, true, 1),
            [all],
            "one rank alone has no one to share with"
        );
        for ranks in sizes(way).filter(|&ranks| ranks > 1) {
            // Padding: less than a quantum for each of six parameters, and less than a quantum a
            // rank at the end; two moments in f32.
            let padding = 2 * 4 * 1024 * (6 + ranks);
            for bytes in bytes(way, true, ranks) {
                let total = bytes * ranks;
                assert!(
                    (all..=all + padding).contains(&total),
                    "{bytes} on {ranks} ranks, of {all}, {way:?}"
                );
            }
        }
    }
}

#[test]
fn values_are_whole_on_every_rank_for_an_evaluation_and_after_a_gather_in_between_nothing_changes()
{
    let Some(_turn) = turn() else { return };
    let ranks = |way: Way| way.ranks_max().min(3)..=way.ranks_max().min(3);
    for (way, ranks) in worlds(&ways(), ranks) {
        let case = way.of(&Case {
            zero: true,
            steps: 0..7,
            ..long()
        });
        let run = |looks: bool| {
            on_ranks(ranks, Some(4), |world| {
                let mut step = case.step(world)?;
                let mut loader = case.loader(world)?;
                for step0 in case.steps.clone() {
                    step.run(loader.load(step0)?, case.learning_rate)?;
                    if looks {
                        step.gather()?;
                        step.gather()?;
                    }
                }
                step.gather()?;
                Ok(step.stages()[0].model().params.values_hash()?)
            })
        };
        let (looked, not) = (run(true), run(false));
        assert_eq!(looked, not, "{way:?}");
        assert!(
            looked.iter().all(|hash| *hash == looked[0]),
            "{looked:x?}, {way:?}"
        );
    }
}

#[test]
fn a_wrong_optimizer_or_model_is_refused_with_help() {
    let Some(_turn) = turn() else { return };
    let refused = |with_shares: bool| -> String {
        let results = try_on_ranks(2, None, |world| {
            let layers = || {
                Box::new(
                    Mlp {
                        hidden: vec![8],
                        outputs: 4,
                        activation: Activation::Relu,
                        dropout: 0.0,
                    }
                    .layers(),
                )
            };
            let reducer = ReducerOptions {
                zero: 1,
                ..ReducerOptions::default()
            };
            let shares = if with_shares {
                reducer.shares(world.size())
            } else {
                1
            };
            let model = Model::with_shares(
                layers(),
                &[6],
                DType::F32,
                Device::Cpu,
                3,
                &|_| false,
                shares,
            )?;
            // Not of_rank.
            let optimizer = Optimizer::new(Rule::adamw(), &model.params)?;
            let options = StepOptions {
                reducer,
                ..StepOptions::default()
            };
            Step::new(
                model,
                Box::new(Mse),
                optimizer,
                world.group("gradients")?,
                &options,
            )
        });
        results
            .into_iter()
            .map(|result| result.unwrap_err().to_string())
            .next()
            .expect("a rank")
    };
    let text = refused(false);
    assert!(
        text.contains("laid out for as many shares, got one for 1") && text.contains("with_shares"),
        "{text}"
    );
    let text = refused(true);
    assert!(
        text.contains("what rank 0 owns") && text.contains("Optimizer::of_slices"),
        "{text}"
    );
}
