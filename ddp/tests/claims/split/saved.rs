//! Split models are saved as whole ones, and continue as either.

use super::*;

#[test]
fn split_models_are_saved_as_the_file_of_the_whole_and_loaded_from_it() {
    let Some(_turn) = turn() else { return };
    let plain = Recipe {
        dropout: 0.25,
        frozen: "3.",
        ..Recipe::regression()
    };
    let alone = places().into_iter().filter(|place| place.ranks == 1);
    let cases = alone.flat_map(|place| {
        [plain.clone(), plain.clone().tied()].map(|recipe| (place.clone(), recipe))
    });
    for (place, recipe) in cases {
        let devices = &place.devices[0];
        let folder = std::env::temp_dir().join(format!(
            "ddp-split-{}-{}",
            std::process::id(),
            devices.len()
        ));
        on_ranks(1, None, |world| {
            let file = |devices: &[Device], name: &str| -> Result<(Step, PathBuf)> {
                let mut step = recipe.step(devices, world)?;
                step.run(recipe.loader(devices, world)?.load(0)?, RATE)?;
                let path = folder.join(name);
                checkpoint::write_model(&path, &params(&step))?;
                Ok((step, path))
            };
            std::fs::create_dir(&folder).unwrap();
            let ((split, in_parts), (_, in_one)) =
                (file(devices, "split")?, file(&devices[..1], "whole")?);
            assert!(
                std::fs::read(&in_parts).unwrap() == std::fs::read(&in_one).unwrap(),
                "{devices:?}"
            );
            let fresh = recipe.step(devices, world)?;
            checkpoint::load_model(&in_one, &params(&fresh))?;
            assert!(values(&fresh)? == values(&split)?, "{devices:?}");
            std::fs::remove_dir_all(&folder).unwrap();
            Ok(())
        });
    }
}

#[test]
fn split_and_whole_models_resume_each_others_checkpoints() {
    let Some(_turn) = turn() else { return };
    for (number, place) in places().into_iter().enumerate() {
        let cases = (0..8).map(|case| [1, 2, 4].map(|bit| case & bit > 0));
        for [zero, from_split, tied] in cases {
            if zero && place.ranks == 1 {
                continue;
            }
            let recipe = Recipe {
                zero: u64::from(zero),
                tied,
                frozen: if tied { "8." } else { "2." },
                clip_norm: 0.25,
                ..Recipe::regression()
            };
            let out =
                std::env::temp_dir().join(format!("ddp-split-run-{}-{number}", std::process::id()));
            let run = |split: bool, goes_on: bool| {
                on_ranks(place.ranks, Some(7), |world| {
                    let devices = &place.devices[world.rank()];
                    let devices = if split { &devices[..] } else { &devices[..1] };
                    let (mut step, mut loader) =
                        (recipe.step(devices, world)?, recipe.loader(devices, world)?);
                    let mut saver = checkpoint::Saver::new(world, &out, 1)?;
                    if goes_on {
                        let opened = checkpoint::newest(&out)?.0.expect("a checkpoint");
                        checkpoint::restore(&opened, &mut step)?;
                    }
                    for step0 in if goes_on { 4..8 } else { 0..8 } {
                        if step0 == 4 && !goes_on {
                            saver.save(&mut step, state(world.size(), &recipe.data, 4))?;
                        }
                        step.run(loader.load(step0)?, RATE)?;
                    }
                    saver.finish()?;
                    step.gather()?;
                    Ok((values(&step)?, moments(&step)?))
                })
            };
            let whole = run(from_split, false);
            let text = format!("{place:?}, ZeRO {zero}, from parts {from_split}, tied {tied}");
            assert!(run(!from_split, true) == whole, "{text}");
            assert!(run(from_split, true) == whole, "{text}, to the same");
            std::fs::remove_dir_all(&out).unwrap();
        }
    }
}
