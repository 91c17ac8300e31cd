// SGD with momentum on one element: see update.rs.
{
    let decay = select(of.decays, of.scalars[1], number(0.0));
    let factor = of.constants[0];
    let decayed = fused(decay, value, grad);
    momentum = fused(factor, momentum, decayed);
    let ahead = fused(factor, momentum, decayed);
    value = value - of.scalars[0] * select(NESTEROV, ahead, momentum);
}
